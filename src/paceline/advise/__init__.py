"""`paceline advise`: how many workers are worth it, from the gradient noise scale.

Owns the verb and the short training run that it may need. The formulas are in `plan/tradeoff.py`.
May import: plan, training, records. Start reading at `advise.py`.
"""
