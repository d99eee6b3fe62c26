"""Metrics for hyperparameter tuning on AI Platform and Vertex AI, in the file format of cloudml-hypertune.

https://github.com/GoogleCloudPlatform/cloudml-hypertune
"""

from __future__ import annotations

import json
import os
import time
from collections import deque

from trainers.common.exits import UserError

DEFAULT_TAG = "training/hptuning/metric"  # cloudml-hypertune's default


class HyperTune:
    """A replacement for ``hypertune.HyperTune`` if that package is not installed, with the same output.

    The file (``CLOUD_ML_HP_METRIC_FILE``, else ``/tmp/hypertune/output.metrics``) contains the last 100 reports, one
    JSON object per line with sorted keys; value, step and trial are strings.
    """

    def __init__(self) -> None:
        self.path = os.environ.get("CLOUD_ML_HP_METRIC_FILE") or "/tmp/hypertune/output.metrics"
        os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
        self.trial = os.environ.get("CLOUD_ML_TRIAL_ID") or "0"
        self.reports: deque[dict[str, object]] = deque(maxlen=100)

    def report_hyperparameter_tuning_metric(
        self, hyperparameter_metric_tag: str, metric_value: float, global_step: int = 0, checkpoint_path: str = ""
    ) -> None:
        """Append one report and rewrite the file."""
        self.reports.append(
            {
                "timestamp": time.time(),
                "trial": self.trial,
                hyperparameter_metric_tag or DEFAULT_TAG: str(float(metric_value)),
                "global_step": str(global_step),
                "checkpoint_path": checkpoint_path,
            }
        )
        with open(self.path, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(report, sort_keys=True) + "\n" for report in self.reports)


def reporter(tag: str) -> HyperTune | None:
    """A reporter of cloudml-hypertune, or its replacement; None outside of a tuning trial and without a ``tag``.

    The tuning services set ``CLOUD_ML_TRIAL_ID`` in a trial. Raises :class:`UserError` if the file cannot be created.
    """
    if not (tag or os.environ.get("CLOUD_ML_TRIAL_ID") or os.environ.get("CLOUD_ML_HP_METRIC_FILE")):
        return None
    try:
        # cloudml-hypertune 0.1.0.dev6 fails if the variable is empty or a file name without a folder.
        if not os.path.dirname(os.environ.get("CLOUD_ML_HP_METRIC_FILE", "/tmp/hypertune/")):
            return HyperTune()
        import hypertune  # type: ignore[import-not-found, unused-ignore]

        return hypertune.HyperTune()  # type: ignore[no-any-return]
    except ImportError:
        return HyperTune()
    except OSError as error:
        raise UserError(f"hypertune: {error.filename}: {error.strerror}; set CLOUD_ML_HP_METRIC_FILE") from None
