"""Weight sync: layouts recorded from loaders, a plan of direct copies, transports, and a proof of every delivery.

`boxes` and `layout` say where tensors lie, `plan` which copies carry them, `transports` how, `digest` and `proof`
whether they arrived, `endpoints` is what runs inside the workers, and `channel` drives it all.
"""
