"""From a candidate to a published image: push, promotion, audit, SBOM, signature."""
