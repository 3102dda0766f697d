"""What single stages work with: sessions, prompts, money, trainers, and tried actions."""
