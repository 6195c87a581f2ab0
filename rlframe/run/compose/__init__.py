"""The composition root: from a RunConfig to objects that know nothing of each other.

run               the whole of a run
online offline    one composition for each loop
modes             one for each mode that does not train
replay            the loop on recorded rollouts, and what records them
trained           the models that train on rollouts
sampling          the sampler that the algorithm asks for
models            policy, critic, teacher, reward model, engines
parts             what every composition has: folder, devices, limits, logs
"""
