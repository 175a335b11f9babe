"""Messages to text, and text to token ids.

    row ──► messages.Chat ──► chat_template ──► rendering ──► text + which characters are trained
            calls             wants, twins      skeleton, assistant_spans, turn_marks
                              jinja_sandbox
    tokenizer file, folder, object ──► load_tokenizer ──► tokenizer.Tokenizer ──► identity

In: one conversation as plain values, or a tokenizer in any form. Out: text with spans, flat arrays of ids.
A template is a program of a stranger: `jinja_sandbox`, `jinja_limits` and `jinja_watch` bound what it can do.
Begin in `chat_template.py`.
"""
