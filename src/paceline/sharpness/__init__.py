"""`paceline sharpness`: how sharp the minimum is that a run found: Keskar's sharpness, SAM's rise, the Hessian's spectrum.

Owns the verb, the loss as a function of one vector of weights, the measures, and the record's sharpness.json.
May import: training, dist, core, records. Start reading at `sharpness.py`.
"""
