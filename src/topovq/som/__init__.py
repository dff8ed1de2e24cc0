"""Maps for data tables, as scikit-learn estimators (importing this imports scikit-learn; the core does not)."""

from topovq.missing import needs

with needs("som"):
    from topovq.som.estimator import SelfOrganizingMap
    from topovq.som.gas import NeuralGas
    from topovq.som.growing import GrowingNeuralGas
    from topovq.som.rows import Rows
    from topovq.som.stats import Stats

__all__ = ["GrowingNeuralGas", "NeuralGas", "Rows", "SelfOrganizingMap", "Stats"]
ESTIMATORS = ("GrowingNeuralGas", "NeuralGas", "SelfOrganizingMap")  # what `topovq.load` may find in a file
