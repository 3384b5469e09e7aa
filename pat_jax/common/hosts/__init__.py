"""A run of several processes: how they find each other, agree, and end."""
