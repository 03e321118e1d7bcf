"""`paceline board`: the report page, live, for all records in a folder.

Owns the server, access control, the list of records and the stream of changes. Never imports torch.
May import: report, records. Start reading at `board.py`.
"""
