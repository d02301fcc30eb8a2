"""PatrickStar: train models bigger than the memory they run in."""
