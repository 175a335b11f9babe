"""Rows to documents: token ids, loss masks and loss weights.

    Source ──► blocks ──► block_reader ──► documents.encode_rows ──► flat ids + offsets + loss masks
    (source,                               texts, pretokenized, chat_rows
     memory, serving)

In: files or rows in memory, a tokenizer, columns. Out: documents as flat arrays, in an order shuffled by `order`.
Begin in `source.py`: a `Source` combines files, columns and a tokenizer.
"""
