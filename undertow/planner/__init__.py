"""What a run will take before it is booked: parameters, memory of every rank, operations, pipeline timeline, layout."""
