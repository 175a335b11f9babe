"""Files to rows: find what the user names, open it locally or by URL, read rows in batches of bounded size.

    paths, globs, URLs ──► finding ──► paths.File ──► opening ──► formats/reader ──► rows.Rows
                           folders                   remote       one file each      columns
                           splits                    contents

In: what the user names. Out: batches of Arrow columns, and `losses.Losses`, which counts what could not be read.
`ours`, `written` and `token_tables` hold the marks and forms of what varlen itself writes.
Begin in `formats/reader.py`: it lists every format and what a reader must give.
"""
