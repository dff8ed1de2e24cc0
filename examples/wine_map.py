"""From a table to an interpreted map: 178 Italian wines, 13 chemical measurements of each, three cultivars.

python examples/wine_map.py [FOLDER]    prints what the map shows, and draws it into FOLDER where one is given
"""

import sys
from collections import Counter
from pathlib import Path

from sklearn.datasets import load_wine
from sklearn.preprocessing import StandardScaler

from topovq.som import SelfOrganizingMap

wine = load_wine(as_frame=False)
X, cultivar = StandardScaler().fit_transform(wine.data), wine.target_names[wine.target]
som = SelfOrganizingMap((8, 10), topology="hexagonal").fit(X).label(X, cultivar)
print(f"quantization error {som.quantization_error_:.2f}, topographic error {som.topographic_error_:.2f}")

clusters = som.cluster(3)  # of the codes: no cultivar went into it
for c in range(3):
    members = Counter(cultivar[som.predict_cluster(X) == c].tolist())
    profile = som.codes_[clusters == c].mean(0)  # in standard deviations from the mean wine
    striking = sorted(range(X.shape[1]), key=lambda i: -abs(profile[i]))[:3]
    print(f"cluster {c}: {dict(members)};", ", ".join(f"{wine.feature_names[i]} {profile[i]:+.1f}" for i in striking))
print(f"wines whose place has the label of their cultivar: {(som.predict_label(X) == cultivar).mean():.0%}")

for folder in map(Path, sys.argv[1:]):
    for kind in ("u_matrix", "hit_map", "label_map", "training_curves"):
        som.plot(kind).figure.savefig(folder / f"{kind}.png", bbox_inches="tight")
    som.plot("code_projection", X=X).figure.savefig(folder / "code_projection.png", bbox_inches="tight")
    planes = som.plot("component_planes", features=[0, 6, 9, 12])
    for ax, i in zip(planes, [0, 6, 9, 12]):
        ax.set_title(wine.feature_names[i])
    planes[0].figure.savefig(folder / "component_planes.png")
