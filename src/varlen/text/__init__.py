"""Messages to text, and text to token ids.

    row ──► messages.Chat ──► chat_template ──► rendering ──► text + which characters are trained
                              wants             skeleton, assistant_spans
                              jinja_sandbox
    tokenizer file, folder, object ──► load_tokenizer ──► tokenizer.Tokenizer ──► identity

In: one conversation as plain values, or a tokenizer in any form. Out: text with spans, flat arrays of ids.
Templates are untrusted programs, which `jinja_sandbox` and `jinja_limits` restrict.
Begin in `chat_template.py`.
"""
