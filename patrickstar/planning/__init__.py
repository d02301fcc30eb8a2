"""What a run will take, before it runs and without allocating the model.

The model is built on the meta device and laid out as the engine would (`rehearsed`), its operators
are noted (`work`) and timed or bounded (`timing`), the planner of the live run plays the trace
under the budgets (`prediction`), and the plan is played against the clock (`timeline`). So the
answer is not a formula about transformers but what this model does on inputs of these shapes. Only
for many ranks there is a formula (`parallel`).
"""

from patrickstar.planning.parallel import DataParallel, Stage, data_parallel
from patrickstar.planning.plan import RunPlan, WhatIf, plan
from patrickstar.planning.prediction import Prediction, StepPrediction, TierPrediction, predict
from patrickstar.planning.rehearsed import Rehearsed, rehearse_run

__all__ = [
    "DataParallel",
    "Prediction",
    "Rehearsed",
    "RunPlan",
    "Stage",
    "StepPrediction",
    "TierPrediction",
    "WhatIf",
    "data_parallel",
    "plan",
    "predict",
    "rehearse_run",
]
