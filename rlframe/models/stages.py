"""Distribution of the layers of a model over pipeline stages and their chunks. Imports no torch.

Chunks are listed in the order in which tokens pass them: chunk 0 of stages 0..pp-1, then chunk 1 of stages 0..pp-1, and
so on (Narayanan et al. 2021, arXiv 2104.04473, section 2.2). Chunk c of stage s is number c * pp + s of the list.
"""

import re

GROUP = re.compile(r"\(([^()]*)\)\*(\d+)")
REPEAT = re.compile(r"([^*|])\*(\d+)")


def chunk_layers(
    num_layers: int,
    *,
    pp: int,
    vpp: int = 1,
    first_stage_layers: int | None = None,
    last_stage_layers: int | None = None,
    pipeline_layout: str | None = None,
) -> list[int]:
    """Returns the number of layers in each of the pp * vpp chunks. The first chunk has the embedding, the last one the
    output.

    Args:
        first_stage_layers: layers of stage 0, all its chunks together; None gives it an equal share.
        last_stage_layers: layers of stage pp - 1.
        pipeline_layout: see `parse_pipeline_layout`; it replaces the other settings except pp.

    Raises:
        ValueError: the layers cannot be divided as requested; the message gives the numbers.
    """
    if pipeline_layout is not None:
        chunks = parse_pipeline_layout(pipeline_layout)
        if sum(chunks) != num_layers:
            raise ValueError(
                f"pipeline_layout {pipeline_layout!r} has {sum(chunks)} layers, num_layers is {num_layers}"
            )
        return chunks
    fixed = {0: first_stage_layers, pp - 1: last_stage_layers}
    fixed = {stage: layers for stage, layers in fixed.items() if layers is not None}
    left, others = num_layers - sum(fixed.values()), pp - len(fixed)
    taken = "".join(
        f" - {name} {layers}"
        for name, layers in (("first_stage_layers", first_stage_layers), ("last_stage_layers", last_stage_layers))
        if layers is not None
    )
    if left < others or (others == 0 and left) or (others and left % others):
        stages = f"the other {others} of pp {pp} stages" if fixed else f"pp {pp}"
        raise ValueError(f"{stages} must divide num_layers {num_layers}{taken}")
    per_stage = [fixed[stage] if stage in fixed else left // others for stage in range(pp)]
    for stage, layers in enumerate(per_stage):
        if layers % vpp:
            raise ValueError(
                f"vpp {vpp} must divide the {layers} layers of stage {stage} (pp {pp}, {num_layers} layers)"
            )
    return [per_stage[stage] // vpp for _ in range(vpp) for stage in range(pp)]


def parse_pipeline_layout(text: str) -> list[int]:
    """Returns the number of layers in each chunk, from Megatron's notation such as `Et*3|(tt|)*29,t|L`.

    `|` separates chunks; E is the embedding, t a layer, L the output; `x*n` and `(...)*n` repeat; commas and spaces are
    ignored. The example has 32 chunks: the embedding and 3 layers, 29 times 2 layers, 1 layer, the output alone.

    Raises:
        ValueError: the text has another letter, or E and L are not first and last, once each.
    """
    expanded = text.replace(",", "").replace(" ", "")
    for pattern in (GROUP, REPEAT):
        expanded = pattern.sub(lambda match: match[1] * int(match[2]), expanded)
    if unknown := sorted(set(expanded) - set("EtL|")):
        hint = " (m, multi-token prediction, is not supported)" if "m" in unknown else ""
        raise ValueError(f"pipeline_layout {text!r}: {unknown[0]!r} must be one of E, t, L, |, *, (){hint}")
    if not re.fullmatch(r"E[t|]*L", expanded):
        raise ValueError(f"pipeline_layout {text!r} must begin with E, end with L, and contain each once")
    return [chunk.count("t") for chunk in expanded.split("|")]
