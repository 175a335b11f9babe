"""Figures to tables, pages and pictures.

    figures ──► inspection, plan, demo ──► words, drawing ──► page (HTML), tables (text)

In: plain figures and plans. Out: text for a terminal, and HTML pages that need nothing else.
Begin in `page.py` for pages and `drawing.py` for pictures.
"""
