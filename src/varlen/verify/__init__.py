"""Proofs that documents are kept apart.

    models/   model ──► loading ──► backends ──► isolation, parity: change one document ──► report.VerifyReport
    batches/  batch ──► reading ──► check, isolation ──► finding.BatchReport

In: a model, or a batch in any trainer's form. Out: a report with a verdict and the way out of each fault.
Begin in `models/api.py`, for batches in `batches/check.py`.
"""
