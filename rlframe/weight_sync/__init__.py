"""Weight sync: layouts recorded from loaders, a plan of direct copies, transports, and a proof of every delivery.

`layout` holds where tensors lie, `plan` which copies carry them, `transports` how, `proof` whether they arrived.
`endpoints` runs inside the workers. `channel` drives the whole from the driver, with `connection`, `choice`, `failure`,
`hold` and `audit`.
"""
