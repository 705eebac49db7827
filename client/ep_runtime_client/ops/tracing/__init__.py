"""What every op's traced program needs: the layer and mesh around it, scopes, varying types."""
