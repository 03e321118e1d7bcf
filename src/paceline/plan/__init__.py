"""`paceline plan`: predict speed, time and cost on 1 to 4096 workers from a record.

Owns the model of a step on a cluster, the cluster files and the noise-scale formulas. Never imports torch.
May import: core.sampler, config, phases, records, spread. Start reading at `plan.py`, then `model.py`.
"""
