"""The experiment behind `varlen demo`: a small Llama, the same documents, several ways to feed it."""
