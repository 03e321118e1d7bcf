"""`paceline report`: records, studies and scaling results as one self-contained HTML page.

Owns reading any record into one JSON-able dict, and the scripts in `assets/` that draw it. Never imports torch.
May import: study.results, records, spread. Start reading at `read.py`; a chart is one file in `assets/`.
"""
