"""Rows to documents: token ids, which of them are trained, and what each weighs.

    Source ──► blocks ──► block_reader ──► documents.encode_rows ──► flat ids + offsets + loss masks
    (source, mixture,                      pretokenized, chat_rows
     memory, serving)

In: files or rows in memory, a tokenizer, columns. Out: documents as flat arrays, in an order that `order` shuffles.
Begin in `source.py`: a `Source` says which files, which columns and which tokenizer.
"""
