"""Who the workers are, how they start, meet and talk. The only part of Paceline that reads rank variables."""
