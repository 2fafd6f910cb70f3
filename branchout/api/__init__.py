"""The Python API: load or pretrain a model, then predict, extend, tune, evaluate, report and export."""

from branchout.api.loading import load, pretrain
from branchout.api.model import Model
from branchout.api.predictor import Image, Prediction, some_of
from branchout.api.sources import Source, samples_in
from branchout.data.samples import as_samples
from branchout.method.running.prepared_extension import Prepared
from branchout.training.work_folder import work_folder

__all__ = [
    "Image",
    "Model",
    "Prediction",
    "Prepared",
    "Source",
    "as_samples",
    "load",
    "pretrain",
    "samples_in",
    "some_of",
    "work_folder",
]
