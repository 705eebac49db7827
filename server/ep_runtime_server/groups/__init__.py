"""Groups and their layers: claims, the states between forming and closed, tickets, late ranks."""
