"""Better scales, zero-points and codes than rounding to nearest gives, found with the help of a text."""
