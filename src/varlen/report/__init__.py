"""Reports: tables for the terminal, and self-contained HTML pages with pictures.

    figures ──► inspection, plan, demo ──► words, drawing ──► page (HTML), tables (text)

In: lengths, plans and figures. Out: text for a terminal, and HTML pages without external resources.
Begin in `page.py` for pages and `drawing.py` for pictures.
"""
