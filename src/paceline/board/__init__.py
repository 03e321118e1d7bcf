"""`paceline board`: the report page, live, for all records in a folder.

Owns the server, access control, the list of records, the stream of changes and `assets/`. Never imports torch.
May import: report, records. Start reading at `board.py`. The charts are the report's (`report/assets/`).
"""
