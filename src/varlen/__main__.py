"""`python -m varlen` is `varlen`, for where no script is on the path."""

from varlen.cli import main

if __name__ == "__main__":
    main()
