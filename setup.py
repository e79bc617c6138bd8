"""Where files of the repository go in a package: everything into `pqcache`, so that an environment gets one name.

baselines/, configs/ and two folders of results/ stand beside the package in the repository. pqcache/places.py finds them.
"""

from setuptools import find_namespace_packages, find_packages, setup

INSIDE = {"pqcache._baselines": "baselines", "pqcache._configs": "configs", "pqcache._published": "results/published"}
INSIDE |= {"pqcache._reference": "results/reference"}

packages = find_packages(include=["pqcache", "pqcache.*"])
for name, folder in INSIDE.items():
    packages += [name, *(f"{name}.{inner}" for inner in find_namespace_packages(folder, exclude=["*__pycache__"]))]

setup(packages=packages, package_dir=INSIDE)
