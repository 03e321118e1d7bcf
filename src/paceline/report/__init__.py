"""`paceline report`: records, studies and scaling results as one self-contained HTML page.

Owns reading any record into one JSON-able dict (a source), and the scripts in `assets/` that draw it. Never imports torch.
May import: study.results, contract, records, spread. Start reading at `read.py`.

To add a chart: `assets/` has one file per section (`curves.js`, `steps.js`, `scaling.js`, `timeline.js`, `study.js`,
`landscape.js` ...); add an item made by `chart()` there. If it needs new data, add a field in `read.py`
(`read_source`). For a new section: a new file in `assets/`, its name in `SCRIPTS` (`page.py`) and its place in `ORDER`
(`assets/page.js`). `axes.js` keeps values that are far from all others off an axis.
"""
