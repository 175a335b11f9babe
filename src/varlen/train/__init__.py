"""The reference trainer behind `varlen train`, and the experiment behind `varlen demo` in `demo/`.

    TOML ──► settings ──► trainer: tokens, model, parallel, plans ──► step ──► metrics, checkpoint

In: a configuration. Out: a trained model's folder, checkpoints from which a run goes on exactly, metrics.
Begin in `trainer.py`.
"""
