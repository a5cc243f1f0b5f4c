module github.com/ummu/ummu

go 1.25.0
