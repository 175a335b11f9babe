"""Reports: tables for the terminal, and self-contained HTML pages with pictures.

    inspection_figures, advice, plan, plan_sweep ──► inspection, plan_table, demo: tables (text)
                                                          └──► *_page, drawing ──► page (HTML)

In: lengths, plans and figures. Out: text for a terminal, and HTML pages without external resources.
Begin in `inspection_figures.py` for figures of `varlen inspect`, `page.py` for pages, `drawing.py` for pictures.
"""
