"""What a host configures: the connections that the jobs and sensors use."""
