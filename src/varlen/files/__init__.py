"""Files to rows: find what the user names, open it locally or by URL, read rows in batches of bounded size.

    paths, globs, URLs ──► finding ──► paths.File ──► opening ──► formats/reader ──► rows.Rows
                           folders                   remote       one file each      columns
                           splits                    retry
                                                     contents

In: paths, globs and URLs. Out: batches of columns, and `losses.Losses`, which counts what could not be read.
`ours`, `written` and `token_tables` define the markers and formats of varlen's own output.
Begin in `formats/reader.py`, which lists every format and what a reader must return.
"""
