"""Proofs that documents are kept apart.

    model ──► trial: change one document ──► isolation, gradients, attention ──► model_report.VerifyReport
    batch ──► batch_reading ──► batch_checks: isolation, numbers, model ──► batch_report.BatchReport

In: a model, or a batch in any trainer's form. Out: a report with a verdict and the way out of each fault.
Begin in `api.py` for models and `batch_checks.py` for batches.
"""
