"""A model served by LitServe (not a dependency of this project), to compare `branchout serve` with.

    python -m benchmarks.speed.litserve_app PORT DEVICE

Its batches are as large as those of `branchout serve`, and wait as long for more images. LitServe reads JSON or forms
and no raw images, so an image is sent as base64 text.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Sequence
from typing import Any

import litserve
import numpy as np

from branchout import api
from branchout.data.decode import decode
from branchout.serve.limits import Limits

LIMITS = Limits()


class Served(litserve.LitAPI):  # type: ignore[misc]
    def setup(self, device: str) -> None:
        self.model = api.load("glyphs", device=device)

    def decode_request(self, request: dict[str, str]) -> np.ndarray:
        return decode(base64.b64decode(request["image"]))

    def batch(self, inputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        return inputs

    def predict(self, images: Sequence[np.ndarray]) -> list[Any]:
        return list(self.model.predict(list(images)))

    def unbatch(self, output: list[Any]) -> list[Any]:
        return output

    def encode_response(self, output: Any) -> dict[str, Any]:
        return {"predictions": [{"class": name, "probability": value} for name, value in output]}


if __name__ == "__main__":
    port, device = sys.argv[1:]
    served = Served(max_batch_size=LIMITS.batch, batch_timeout=LIMITS.linger)
    server = litserve.LitServer(served, accelerator="cuda" if device.startswith("cuda") else "cpu", devices=1)
    server.run(host="127.0.0.1", port=int(port), generate_client_file=False, log_level="warning")
