"""A job for torchrun: trains one run after the other, as a file of JSON lists them."""

import json
import sys
from pathlib import Path

from training import Notes

from varlen.train.config import as_settings
from varlen.train.settings import TrainSettings
from varlen.train.trainer import train

if __name__ == "__main__":
    for made in json.loads(Path(sys.argv[1]).read_text()):
        train(as_settings(TrainSettings, made, ""), Notes())
