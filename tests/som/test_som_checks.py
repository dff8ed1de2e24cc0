"""scikit-learn's own checks of an estimator, all of them."""

import json
import os

import pytest
from warm import python

pytestmark = pytest.mark.xdist_group("estimator checks")

ORDER = "an online rule depends on the order of the samples, so one sample of weight 2 is not that sample twice"
CASES = {
    "SelfOrganizingMap()": {},
    "SelfOrganizingMap((4, 3), topology='hexagonal', wrap=True, metric='cosine')": {},
    "SelfOrganizingMap(5, neighborhood='hard', schedule='linear', metric='dot', rule='minibatch')": {},
    "SelfOrganizingMap((3, 3), rule='online', max_iter=2)": {
        "check_sample_weight_equivalence_on_dense_data": ORDER,
        "check_sample_weight_equivalence_on_sparse_data": ORDER,
    },
    "NeuralGas()": {},
    "GrowingNeuralGas(max_codes=20, max_iter=3)": {},
}
SCRIPT = """
import json, sys, torch, warnings
warnings.simplefilter("ignore")
torch.set_num_threads(1)
from sklearn.utils.estimator_checks import check_estimator
from topovq.som import GrowingNeuralGas, NeuralGas, SelfOrganizingMap
results = {}
for estimator, expected in json.loads(sys.argv[1]).items():
    checks = check_estimator(eval(estimator), expected_failed_checks=expected, on_fail=None, on_skip=None)
    results[estimator] = [[c["check_name"], c["status"], str(c["exception"])] for c in checks]
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def results():
    # In a process of its own: SciPy reads SCIPY_ARRAY_API when it is imported, and without it one check is skipped.
    process = python("-c", SCRIPT, json.dumps(CASES), env=os.environ | {"SCIPY_ARRAY_API": "1"})
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


@pytest.mark.parametrize("estimator", CASES)
def test_check_estimator(results, estimator):
    assert len(results[estimator]) > 40
    # Checks of set_output with a library that is not there are skipped by name; nothing else may be.
    bad = [r for r in results[estimator] if r[1] != "passed" and "not installed" not in r[2]]
    assert {name for name, status, _ in bad if status == "xfail"} == set(CASES[estimator])
    assert [r for r in bad if r[1] != "xfail"] == []
