"""Run in an image: print each requirement of an installed package that is not met there."""

from importlib.metadata import PackageNotFoundError, distributions, version

from packaging.requirements import Requirement

for package in distributions():
    for text in package.requires or []:
        needed = Requirement(text)
        if needed.marker and not needed.marker.evaluate({"extra": ""}):
            continue
        try:
            met = needed.specifier.contains(version(needed.name), prereleases=True)
        except PackageNotFoundError:
            met = False
        if not met:
            print(f"{needed.name}: {package.name} asks for {needed}")
