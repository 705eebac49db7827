"""Groups and their layers: claims, states from forming to closed, attach tokens, late ranks."""
