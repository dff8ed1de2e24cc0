"""Maps for data tables, as scikit-learn estimators (importing this imports scikit-learn; the core does not)."""

from topovq.missing import needs

with needs("som"):
    from topovq.som.estimator import SelfOrganizingMap
    from topovq.som.gas import NeuralGas
    from topovq.som.growing import GrowingNeuralGas

__all__ = ["GrowingNeuralGas", "NeuralGas", "SelfOrganizingMap"]
