"""Hugging Face models: where they come from, what their config means, how their tensors become Megatron parameters.

How to add a family, on one page. Say its Hugging Face `model_type` is `newmodel`.

1. Write `families/newmodel.py`, ending in `FAMILY = NewModel()`. The file name is the model type; nothing registers it.
2. If it is a decoder with fused QKV, gated MLP and optional experts, subclass `Decoder` and write only
   `architecture`: what of `config.json` describes the model, refusing with `fault` whatever we would get wrong in
   silence (a sliding window, another activation, a rope we do not scale).
3. Otherwise subclass `Family` and write four methods:
   - `architecture(hf)`: as above;
   - `tensors(architecture)`: name and shape of every tensor `save_pretrained` writes, experts one by one;
   - `parameters(architecture, shard)`: name and shape of a rank's Megatron parameters;
   - `load(parameters, checkpoint, architecture, shard)`: fill this rank's Megatron parameters from the Hugging Face
     tensors with views, `copy_` and `zero_`. This is all. It is run once on meta tensors and recorded; loading,
     exporting, weight sync and digests replay the recording, so there is no second table to write.
4. `tests/contracts/test_model_family.py` finds the file by itself: add a small transformers config to its list. It
   compares `tensors` with what transformers writes and replays `load` both ways under every parallel layout. A
   parameter element that nothing fills, or that is filled twice, is refused by name.
"""
