"""`paceline landscape`: the loss around a trained model, along a path of training, or between two models.

Owns the verb, directions, the evaluation of many sets of weights, and static pictures.
May import: training, records. Start reading at `landscape.py`.
"""
