"""From configuration classes to options: declared, found in files, explained, misspelt."""
