"""`paceline study`: train arms x seeds from a TOML file, and compare them.

Owns the study file, its folder of records, the slots that share the work, and the result tables.
May import: training, records, spread. Start reading at `study.py`.
"""
