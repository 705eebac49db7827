"""Groups and their layers: claims, states, attach tokens, layers and late ranks."""
