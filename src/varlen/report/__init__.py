"""Figures to tables, pages and pictures.

    figures ──► inspection, plan_compare, findings ──► words, charts ──► page (HTML), tables (text)

In: plain figures and plans. Out: text for a terminal, and HTML pages that need nothing else.
Begin in `page.py` for pages and `charts.py` for pictures.
"""
