"""What notebooks show: figures (`plots`), live panels (`panels`, `runner`), predictions and checkers (`lessons`)."""
