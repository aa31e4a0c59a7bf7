"""The program of `probe`, alone in this folder, because Python searches the folder of a script for imports first."""
